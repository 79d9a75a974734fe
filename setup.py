"""Build the native library on all cores; everything else is in pyproject.toml."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

CSRC = Path("foreword/kernels/csrc")


class NativeBuildExt(build_ext):
    """Compile sources side by side; an editable installation reuses a library that is newer than they are."""

    def finalize_options(self) -> None:
        super().finalize_options()
        for extension in self.extensions:
            # Those that take longest come first: no core waits for them at the end.
            sources = sorted(str(path) for path in CSRC.rglob("*.cpp"))
            extension.sources = sorted(sources, key=lambda path: "quantized_avx2" not in path)
            extension.depends = sorted(str(path) for path in CSRC.rglob("*") if path.suffix in (".h", ".inc"))

    def build_extension(self, ext: Extension) -> None:
        built, path = Path(self.get_ext_fullpath(ext.name)), Path(self.get_ext_filename(ext.name))
        sources = [*ext.sources, *ext.depends, "setup.py", "pyproject.toml"]
        if self.editable_mode and path.exists() and not newer_group(sources, str(path)):
            built.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, built)
            return
        compile_source = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_source([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_all
        super().build_extension(ext)


setup(cmdclass={"build_ext": NativeBuildExt})
