# The dashboard in a container.
#
#   docker build -t ampscope .
#   docker run --rm --init -p 127.0.0.1:8501:8501 -v ampscope:/data ampscope
#
# then http://localhost:8501. Publish on 127.0.0.1 as above and nowhere else: the dashboard has no
# log-in, and whoever reaches it can start probes. For NVIDIA GPUs build with the wheel index of a
# CUDA version that the driver runs, and hand the GPUs over:
#
#   docker build -t ampscope --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm --init --gpus all -p 127.0.0.1:8501:8501 -v ampscope:/data ampscope
#
# Workload files of your own: -v "$PWD/workloads:/workloads:ro" -e AMPSCOPE_WORKLOADS=/workloads

FROM python:3.11-slim-bookworm

# Where torch comes from. The version is that of requirements.txt; the index adds "+cpu" or "+cu130"
# to it, which pip ranks above the plain version.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/ampscope

# Dependencies in a layer of their own: it is rebuilt only when requirements.txt changes. The last
# line there, "-e .", is the package itself.
COPY requirements.txt ./
RUN grep -v '^-e ' requirements.txt > /tmp/dependencies.txt \
    && pip install --extra-index-url "${TORCH_INDEX}" -r /tmp/dependencies.txt \
    && rm /tmp/dependencies.txt

COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY app app
COPY pages pages
RUN pip install --no-deps . \
    && useradd --create-home --uid 10001 ampscope \
    && install --directory --owner=ampscope --group=ampscope /data

USER 10001

# The store. 0.0.0.0 is right inside a container alone: it is the container's own network, and only
# what -p publishes is reachable.
ENV AMPSCOPE_STORE=/data/runs.db \
    STREAMLIT_SERVER_ADDRESS=0.0.0.0 \
    STREAMLIT_SERVER_HEADLESS=true \
    STREAMLIT_SERVER_PORT=8501

VOLUME ["/data"]
EXPOSE 8501

# Streamlit's own endpoint; the slim image has Python and no curl.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8501/_stcore/health', timeout=4)"]

CMD ["streamlit", "run", "app/main.py"]
