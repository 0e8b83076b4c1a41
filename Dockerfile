# Serves models on the CPU. Weights are kept in the folder that is mounted at /cache.
#
#   docker build -t moegraft .
#   docker run -p 8000:8000 -v ~/.cache/huggingface:/cache moegraft --model path/or/hub-id
#
# Options after the name are those of `moegraft serve`. Without --model, the bundled model is served.

FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv
# uv finds PyTorch's own builds by this name. Empty: the build on the package index, which brings gigabytes of CUDA on x86-64.
ARG TORCH_BACKEND=cpu
ENV PATH=/opt/uv/bin:$PATH VIRTUAL_ENV=/opt/moegraft UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 UV_LINK_MODE=copy
WORKDIR /src
# In a layer of its own, which changes of moegraft leave alone.
COPY constraints.txt .
RUN uv venv --python /usr/bin/python3 /opt/moegraft \
    && uv pip install -c constraints.txt ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} torch
COPY . .
# What is installed: these sources, or a wheel in dist/, or "moegraft" as published.
ARG MOEGRAFT=.
RUN uv pip install -c constraints.txt -b constraints.txt "$MOEGRAFT[serve]"

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home moegraft && install -d -o moegraft -g moegraft /cache
COPY --from=build /opt/moegraft /opt/moegraft
ENV PATH=/opt/moegraft/bin:$PATH HF_HOME=/cache
USER moegraft
WORKDIR /home/moegraft
EXPOSE 8000
# Docker kills a container 10 seconds after it asked it to stop.
ENTRYPOINT ["moegraft", "serve", "--host", "0.0.0.0", "--grace", "5"]
