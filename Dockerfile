# syntax=docker/dockerfile:1
# A service that answers with the models in /models.
#
#   docker build -t bertsmith .                                                           CPU
#   docker build -t bertsmith:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .      CUDA
#
# The usual wheels of PyTorch carry CUDA's libraries, so that the image needs none: the host gives its driver
# (NVIDIA's container toolkit). The index below has wheels without them, a tenth of the size.
#
# For a build that can be repeated, pin the base image: --build-arg BASE=python:3.12-slim@sha256:…, with the digest that
# `docker buildx imagetools inspect python:3.12-slim` prints.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /source
RUN python -m venv /opt/bertsmith
# PyTorch by itself, first: it is large and changes seldom
COPY constraints.txt ./
RUN /opt/bertsmith/bin/pip install --constraint constraints.txt --index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# onnxruntime runs folders that were exported to ONNX
RUN /opt/bertsmith/bin/pip install --constraint constraints.txt ".[serve]" "onnxruntime>=1.22"

FROM ${BASE}
RUN groupadd --gid 10001 bertsmith \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin bertsmith
COPY --from=build /opt/bertsmith /opt/bertsmith
ENV PATH=/opt/bertsmith/bin:${PATH} \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /models
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=2)"]
# in a container the loopback address reaches nobody; who may connect is said where its port is published
ENTRYPOINT ["bertsmith", "serve", "--host", "0.0.0.0", "--port", "8080"]
CMD ["/models/model"]
