# The dashboard in a container.
#
#   docker build -t ampscope .
#   docker run --rm --init -p 127.0.0.1:8501:8501 -v ampscope:/data ampscope
#
# then http://127.0.0.1:8501. Publish on 127.0.0.1 as above: whoever reaches the dashboard can run code
# in the container, and as started here it asks for no token. With `-e AMPSCOPE_TOKEN=…` (16 letters or
# digits at least) a browser must open http://127.0.0.1:8501/open/TOKEN first; for a class, or behind a
# proxy with TLS and a sign-in, see docs/classroom.md. It answers under loopback names and those in
# AMPSCOPE_PUBLIC_URL. For NVIDIA GPUs build with the wheel index of a CUDA version that the driver
# runs, and hand the GPUs over:
#
#   docker build -t ampscope --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm --init --gpus all -p 127.0.0.1:8501:8501 -v ampscope:/data ampscope
#
# Workload files of your own: -v "$PWD/workloads:/workloads:ro" -e AMPSCOPE_WORKLOADS=/workloads

# The tag of 25 August 2026, for every processor: a tag may be moved, a digest may not.
FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b

# Where torch comes from, and nothing else does: two indexes at once would let either of them serve
# any package. The version is that of requirements.txt; the index adds "+cpu" or "+cu130" to it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/ampscope

# On CUDA, Triton compiles the kernel that counts exponents, and a small C module that starts it.
RUN case "${TORCH_INDEX}" in \
      */cpu) ;; \
      *) apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
         && rm -rf /var/lib/apt/lists/* ;; \
    esac

# Dependencies in a layer of their own: it is rebuilt only when they change. The lock has the hashes
# of the wheels that were tested (for this image's Python, on x86-64); on another processor the
# versions of requirements.txt are installed without hashes.
COPY requirements.txt requirements.lock .ci/requirements-build.txt ./
RUN pip install --index-url "${TORCH_INDEX}" "$(grep '^torch==' requirements.txt)" \
    && if [ "$(uname -m)" = x86_64 ]; then \
         pip install --require-hashes --no-deps -r requirements.lock; \
       else \
         grep -v -e '^-e ' -e '^torch==' requirements.txt > /tmp/others.txt \
         && pip install -r /tmp/others.txt && rm /tmp/others.txt; \
       fi \
    && pip install --require-hashes --no-deps -r requirements-build.txt

COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY app app
COPY pages pages
RUN pip install --no-build-isolation --no-deps . \
    && useradd --create-home --uid 10001 ampscope \
    && install --directory --owner=ampscope --group=ampscope /data

USER 10001

# The store. 0.0.0.0 is right inside a container alone: it is the container's own network, and only
# what -p publishes is reachable.
ENV AMPSCOPE_STORE=/data/runs.db \
    AMPSCOPE_CONTAINER=1 \
    STREAMLIT_SERVER_ADDRESS=0.0.0.0 \
    STREAMLIT_SERVER_HEADLESS=true \
    STREAMLIT_SERVER_PORT=8501

VOLUME ["/data"]
EXPOSE 8501

# Streamlit's own endpoint; the slim image has Python and no curl.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8501/_stcore/health', timeout=4)"]

CMD ["streamlit", "run", "app/main.py"]
