# One image for gateways and workers.
#
#   docker build --tag REGISTRY/baton:0.1.0 .
#   docker build --build-arg TORCH_INDEX=URL ...   a further package index for torch: the one that PyTorch's install
#                                                  page names for its CPU builds saves some gigabytes

FROM python:3.11-slim AS build
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/baton
WORKDIR /src
COPY constraints.txt ./
# The largest part, and the one that changes least: a layer of its own.
RUN /opt/baton/bin/pip install --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY LICENSE README.md pyproject.toml ./
COPY protos protos
COPY services services
COPY kvtransfer kvtransfer
COPY loadtest loadtest
RUN /opt/baton/bin/pip install --constraint constraints.txt '.[otel]'

FROM python:3.11-slim
# With a compiler: Triton builds what starts a kernel on a GPU when a worker starts.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# A number, because Kubernetes cannot tell of a name that it is not root. Whoever looks for a home finds what is writable.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 9000 9001 9100 9200
ENTRYPOINT ["baton"]
