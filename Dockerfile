# docker build -t foreword .                      for CPUs
# docker build -t foreword:cuda --target cuda .   for NVIDIA GPUs
# Build arguments: EXTRAS (of the package, joined by commas), and pip's settings: a mirror is --build-arg PIP_INDEX_URL=...,
# a proxy --build-arg HTTPS_PROXY=... docs/deploying.md has the rest.

FROM python:3.11-slim-bookworm AS python

# The package with its native kernels, which neither build of PyTorch changes.
FROM python AS wheel
ARG PIP_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY foreword ./foreword
# Without kernels the wheel would be built, and torch would compute instead.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python -c 'import sys, zipfile; sys.exit("/kernels/_native" not in str(zipfile.ZipFile(sys.argv[1]).namelist()))' /wheels/*

# Dependencies are layers of their own: a change of the code does not install them again.
FROM python AS requirements
ARG EXTRAS=otel
WORKDIR /src
COPY pyproject.toml ./
RUN python -m venv /opt/foreword \
    && python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = [project["optional-dependencies"][name] for name in sys.argv[1].split(",") if name]; \
print(*project["dependencies"], *sum(extras, []), sep="\n")' "$EXTRAS" >requirements.txt

FROM requirements AS install-cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN /opt/foreword/bin/pip install --no-cache-dir -r requirements.txt
COPY --from=wheel /wheels /wheels
RUN /opt/foreword/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

# PyPI's PyTorch has CUDA's libraries, and brings Triton.
FROM requirements AS install-cuda
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN /opt/foreword/bin/pip install --no-cache-dir -r requirements.txt
COPY --from=wheel /wheels /wheels
RUN /opt/foreword/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

FROM python AS runtime
LABEL org.opencontainers.image.title=foreword org.opencontainers.image.version=0.1.0 org.opencontainers.image.licenses=Apache-2.0
# They exist, so that volumes there belong to the user: downloaded models and Triton's kernels; the usage database.
RUN useradd --create-home --uid 1000 foreword && \
    install -d -o foreword -g foreword /home/foreword/.cache /home/foreword/state
ENV PATH=/opt/foreword/bin:$PATH PYTHONUNBUFFERED=1 FOREWORD_HOST=0.0.0.0 FOREWORD_PORT=8000
WORKDIR /home/foreword
EXPOSE 8000
STOPSIGNAL SIGTERM
# The first success ends the start period: it bounds how long kernels are compiled and a model loads.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 \
    CMD ["python", "-m", "foreword.cli.container_health"]
# Exec form: the server is process 1 itself, handles SIGTERM and waits for its engine.
ENTRYPOINT ["foreword"]
CMD ["serve"]

FROM runtime AS cuda
# Triton compiles its driver and launchers at run time, with Python's headers of this image.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && test -f /usr/local/include/python3.11/Python.h
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/home/foreword/.cache/triton
COPY --from=install-cuda /opt/foreword /opt/foreword
USER 1000:1000

FROM runtime AS cpu
COPY --from=install-cpu /opt/foreword /opt/foreword
USER 1000:1000
