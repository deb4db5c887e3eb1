# opcast with its extras, for CPUs: predicts for any device, measures and trains on the CPU.
#
#   docker build -t opcast .
#   docker run --rm -v "$PWD:/work" opcast predict step.mlir --device h100-sxm
#
# The compilers of GPUs and TPUs are left out (1.5 GB): add them with --build-arg COMPILERS="gpu tpu".

FROM python:3.12-slim-bookworm AS build
ARG TORCH="torch==2.13.0"
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
ARG COMPILERS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/opcast
ENV PATH="/opt/opcast/bin:$PATH" OPCAST_COMPILERS="/opt/opcast/compilers"
# Installed before the extras, which would pull in gigabytes of CUDA.
RUN pip install "$TORCH" --index-url "$TORCH_INDEX"
COPY . /src
RUN pip install "/src[track,gnn,serve]" --constraint /src/constraints.txt
RUN mkdir -p "$OPCAST_COMPILERS" && if [ -n "$COMPILERS" ]; then opcast compilers install $COMPILERS; fi

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 10001 opcast && mkdir /work && chown opcast:opcast /work
COPY --from=build /opt/opcast /opt/opcast
ENV PATH="/opt/opcast/bin:$PATH" \
    OPCAST_COMPILERS="/opt/opcast/compilers" \
    OPCAST_CACHE="/home/opcast/.cache/opcast" \
    OPCAST_DATA="/home/opcast/.local/share/opcast" \
    JAX_PLATFORMS="cpu"
USER opcast
WORKDIR /work
# Of `opcast serve --host 0.0.0.0` at its default port; for other commands: docker run --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=5s --start-period=90s CMD ["python", "-c", \
  "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["opcast"]
CMD ["--help"]
