"""Without the flag nothing of OpenTelemetry is imported; without its packages the flag is a named error."""

import subprocess
import sys

import pytest

from foreword.errors import ConfigError
from foreword.metrics.tracing import open_tracer


def test_packages_are_not_imported_without_an_endpoint() -> None:
    code = """
import sys
from foreword.server.http import request_log
request_log.open_tracer(None, "0")
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_packages_name_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'foreword\[otel\]'") as error:
        open_tracer("http://localhost:4318/v1/traces", "0")
    assert error.value.param == "otlp_traces_endpoint"


@pytest.mark.parametrize(
    "endpoint", ["http://localhost:4317", "grpc://localhost:4317", "localhost:4318/v1/traces"]
)
def test_endpoint_of_another_protocol_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="such as http://localhost:4318/v1/traces"):
        open_tracer(endpoint, "0")
