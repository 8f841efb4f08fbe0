# One image for gateways and workers, for CPUs or for NVIDIA GPUs. docs/run/kubernetes.md says how it is built and run.
#
#   docker build --target cpu --tag REGISTRY/baton:0.1.0 .
#   docker build --target cuda --tag REGISTRY/baton:0.1.0-cuda .
#
#   --build-arg BASE=python:3.11-slim-bookworm@sha256:...   the base by its digest, so that two builds start alike:
#                                                           `docker buildx imagetools inspect python:3.11-slim-bookworm`
#                                                           prints it
#   --build-arg TORCH_INDEX=URL       cpu: the index that PyTorch's install page names for its CPU builds; without it
#                                     pip may take a build for GPUs, which is gigabytes larger
#   --build-arg REVISION="$(git rev-parse HEAD)"            for the label

ARG BASE=python:3.11-slim-bookworm

# pip and what writes the list of packages stay in an environment of their own, which no image gets.
FROM ${BASE} AS tools
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/tools \
    && /opt/tools/bin/pip install --constraint constraints.txt cyclonedx-bom \
    && python -m venv --without-pip /opt/baton

FROM tools AS wheel
COPY LICENSE README.md pyproject.toml ./
COPY protos protos
COPY services services
COPY kvtransfer kvtransfer
COPY loadtest loadtest
RUN /opt/tools/bin/pip wheel --no-deps --wheel-dir /wheels .

# torch is the largest part, and the one that changes least: a layer of its own.
FROM tools AS build-cpu
ARG TORCH_INDEX=""
RUN /opt/tools/bin/pip --python /opt/baton/bin/python install --constraint constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY --from=wheel /wheels /wheels
RUN /opt/tools/bin/pip --python /opt/baton/bin/python install --constraint constraints.txt \
    "$(echo /wheels/*.whl)[console,otel]"
RUN /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/baton/sbom.json /opt/baton

FROM tools AS build-cuda
RUN /opt/tools/bin/pip --python /opt/baton/bin/python install --constraint constraints.txt torch
COPY --from=wheel /wheels /wheels
RUN /opt/tools/bin/pip --python /opt/baton/bin/python install --constraint constraints.txt \
    "$(echo /wheels/*.whl)[console,otel,gpu]"
RUN /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/baton/sbom.json /opt/baton

# What both images have: a user, and directories that are written to. The root can be read-only.
FROM ${BASE} AS runtime
# A number, because Kubernetes cannot tell of a name that it is not root. Whoever looks for a home finds what is writable.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton \
    && install --directory --owner=10001 --group=10001 --mode=0700 /var/cache/baton /var/cache/huggingface
ENV PATH=/opt/baton/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/baton \
    TRITON_CACHE_DIR=/var/cache/baton/triton \
    HF_HOME=/var/cache/huggingface
ARG REVISION=""
LABEL org.opencontainers.image.title="Baton" \
    org.opencontainers.image.description="Serves large language models with prefill and decode on separate workers." \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="${REVISION}"
WORKDIR /tmp
# Compiled kernels, models from the hub, sockets. Mounted volumes keep the first two for the next container.
VOLUME ["/var/cache/baton", "/var/cache/huggingface", "/tmp"]
# API, gRPC, admin, prefill and decode. No HEALTHCHECK: which port to ask depends on the command; the chart's probes know it.
EXPOSE 8000 9000 9001 9100 9200
ENTRYPOINT ["baton"]

FROM runtime AS cuda
# Triton builds what starts a kernel on a GPU when a worker starts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/baton /opt/baton
USER 10001:10001

# Last, and so the one that is built without --target.
FROM runtime AS cpu
COPY --from=build-cpu /opt/baton /opt/baton
USER 10001:10001
