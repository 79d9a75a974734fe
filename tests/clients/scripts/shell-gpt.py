import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from case import KEY, MODEL, PROMPT, SYSTEM, V1, report

with tempfile.TemporaryDirectory() as roles:
    Path(roles, "brief.json").write_text(json.dumps({"name": "brief", "role": SYSTEM}))
    environ = {
        **os.environ,
        "API_BASE_URL": V1,
        "OPENAI_API_KEY": KEY,
        "DEFAULT_MODEL": MODEL,
        "ROLE_STORAGE_PATH": roles,
    }
    # It sends tools only if functions are installed for it.
    words = ["--no-md", "--no-cache", "--no-interaction", "--temperature", "0", "--role", "brief", PROMPT]
    said = subprocess.run(
        [sys.executable, "-m", "sgpt", *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
report(with_system=said.strip())
