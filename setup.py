"""Build the native library on all cores; everything else is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class ParallelBuildExt(build_ext):
    """Compile the sources of an extension side by side; setuptools compiles them one after the other."""

    def build_extension(self, ext: Extension) -> None:
        compile_source = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_source([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_all
        super().build_extension(ext)


setup(cmdclass={"build_ext": ParallelBuildExt})
