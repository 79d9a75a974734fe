# docker build -t foreword . && docker run --rm -p 8000:8000 foreword
# pip takes its settings from build arguments. By default torch is PyTorch's CPU build; --build-arg PIP_EXTRA_INDEX_URL= leaves
# PyPI's, with CUDA. A mirror: --build-arg PIP_INDEX_URL=...; a proxy: --build-arg HTTPS_PROXY=...

FROM python:3.11-slim AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY foreword ./foreword
RUN python -m venv /opt/foreword && /opt/foreword/bin/pip install --no-cache-dir .

FROM python:3.11-slim
COPY --from=build /opt/foreword /opt/foreword
# Triton, which comes with PyTorch's CUDA builds, compiles its driver and launchers at run time, with Python's headers of this image.
RUN if [ -d /opt/foreword/lib/python3.11/site-packages/triton ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
        && test -f /usr/local/include/python3.11/Python.h; fi
# .cache exists, so that a volume there belongs to the user: downloaded models, Triton's kernels.
RUN useradd --create-home --uid 1000 foreword && install -d -o foreword -g foreword /home/foreword/.cache
USER foreword
WORKDIR /home/foreword
ENV PATH=/opt/foreword/bin:$PATH PYTHONUNBUFFERED=1 FOREWORD_HOST=0.0.0.0 FOREWORD_PORT=8000 \
    TRITON_CACHE_DIR=/home/foreword/.cache/triton
EXPOSE 8000
STOPSIGNAL SIGTERM
# The first success ends the start period: it bounds how long kernels are compiled and a model loads.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 \
    CMD ["python", "-m", "foreword.cli.container_health"]
# Exec form: the server is process 1 itself, handles SIGTERM and waits for its engine.
ENTRYPOINT ["foreword"]
CMD ["serve"]
