# The serving images: `cpu`, the default, and `gpu`, which contains CUDA and cuDNN as pinned wheels. The GPU
# image needs only the NVIDIA driver on the host, 580 or newer.
#
#     docker build -t quartet .
#     docker build -t quartet:gpu --target gpu --build-arg DEVICE=gpu .
#     docker build -t quartet:hub --target hub --build-arg DEVICE=hub .
#
# `hub` is `quartet serve` for a CPU: it serves names on the hub, which it keeps in the volume /cache. It reads ONNX graphs,
# and with --build-arg CHECKPOINTS=1 all checkpoints.
#
# PYTHON_IMAGE is any Debian-based image with Python 3.11 or newer as python3, BUNDLE any directory under
# bundles/; EXTRAS=otel adds tracing. BuildKit and the classic builder both accept this file.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# --- build: an environment without pip for the images, and a pip beside it to fill it

FROM ${PYTHON_IMAGE} AS build
# A plain Debian image has python3, but may lack its venv module.
RUN python3 -m venv /opt/pip || { \
        apt-get update && apt-get install --yes --no-install-recommends python3-venv \
        && python3 -m venv --clear /opt/pip; \
    }
RUN python3 -m venv --without-pip /opt/quartet
WORKDIR /build
COPY pyproject.toml constraints.txt ./
COPY deploy/requirements.py deploy/

FROM build AS build-gpu
ARG PIP_INDEX_URL
ARG TARGETARCH
ARG DEVICE
ARG EXTRAS
# The classic builder runs every stage above its target, and leaves TARGETARCH empty. There, only DEVICE=gpu
# fills this environment, so that the build of a CPU image does not download gigabytes of CUDA.
RUN if [ -n "${TARGETARCH}" ] || [ "${DEVICE}" = gpu ]; then \
        python3 deploy/requirements.py --image gpu ${EXTRAS} > requirements.txt \
        && /opt/pip/bin/pip --python /opt/quartet/bin/python install --no-cache-dir \
            --only-binary :all: --constraint constraints.txt --requirement requirements.txt; \
    else \
        echo "Leaving out CUDA: with this builder, the gpu target needs --build-arg DEVICE=gpu"; \
    fi

FROM build AS build-cpu
ARG PIP_INDEX_URL
ARG EXTRAS
RUN python3 deploy/requirements.py --image cpu ${EXTRAS} > requirements.txt \
    && /opt/pip/bin/pip --python /opt/quartet/bin/python install --no-cache-dir \
        --only-binary :all: --constraint constraints.txt --requirement requirements.txt

# The hub client and ONNX graphs; with CHECKPOINTS=1, training's packages as well, gigabytes with torch. As above, the
# classic builder fills this environment with DEVICE=hub only.
FROM build AS build-hub
ARG PIP_INDEX_URL
ARG TARGETARCH
ARG DEVICE
ARG EXTRAS
ARG CHECKPOINTS
RUN if [ -n "${TARGETARCH}" ] || [ "${DEVICE}" = hub ]; then \
        python3 deploy/requirements.py cpu hub ${CHECKPOINTS:+train} ${EXTRAS} > requirements.txt \
        && /opt/pip/bin/pip --python /opt/quartet/bin/python install --no-cache-dir \
            --only-binary :all: --constraint constraints.txt --requirement requirements.txt; \
    else \
        echo "Leaving out the hub client: with this builder, the hub target needs --build-arg DEVICE=hub"; \
    fi

# --- app: the service and its bundle, readable by every user, independent of the checkout's modes

FROM ${PYTHON_IMAGE} AS app
ARG BUNDLE=bundles/quartet-mini
COPY service/ /app/service/
COPY ${BUNDLE}/ /bundles/default/
# The service finds it there as an installed wheel finds its bundle, so options after the image's name do not replace it.
RUN ln -s /bundles/default /app/service/default_bundle
# Byte code that is valid for all file times, because image layers may change them and the images write no byte code.
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /app \
    && chmod -R a+rX /app /bundles

# All packages, for the command quartet, and an empty cache that the image's user may write.
FROM app AS app-hub
COPY model/ /app/model/
COPY export/ /app/export/
COPY quartet/ /app/quartet/
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /app && chmod -R a+rX /app && mkdir /cache

# --- runtime: how the images run: without further packages, without root, without writing files

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="Quartet" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    QUARTET_HOST=0.0.0.0 \
    QUARTET_PORT=8000
WORKDIR /app
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# http.client, because urllib would use a proxy of the environment.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/opt/quartet/bin/python", "-c", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('QUARTET_PORT') or 8000), timeout=4); c.request('GET', '/health/ready'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["/opt/quartet/bin/python", "-m", "service"]
CMD []

FROM runtime AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/quartet /opt/quartet
COPY --from=app /app /app
COPY --from=app /bundles /bundles

FROM runtime AS hub
ENV XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
COPY --from=build-hub /opt/quartet /opt/quartet
COPY --from=app-hub /app /app
COPY --from=app-hub /bundles /bundles
COPY --from=app-hub --chown=10001:10001 /cache /cache
VOLUME /cache
ENTRYPOINT ["/opt/quartet/bin/python", "-m", "quartet", "serve"]

# The last stage is the default.
FROM runtime AS cpu
COPY --from=build-cpu /opt/quartet /opt/quartet
COPY --from=app /app /app
COPY --from=app /bundles /bundles
