# A translation service: build it where the model is, or mount the model.
#
#   docker build -t vanilla-transformer .
#   docker run --rm -p 127.0.0.1:5000:5000 -v "$PWD/runs/de-en:/model:ro" vanilla-transformer
#
# Behind a proxy, add its name: `... vanilla-transformer --allowed_hosts translate.example.org`.
FROM python:3.11-slim

LABEL org.opencontainers.image.source="https://github.com/OWNER/vanilla_transformer"

# torch without CUDA is a tenth of the size; both indexes have the pinned release.
ENV PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /build
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN pip install --constraint constraints.txt '.[serve,export]' && rm -rf /build

# The service neither writes to the model nor needs rights of its own.
RUN useradd --create-home --uid 10001 service
USER service
WORKDIR /home/service
ENV HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

EXPOSE 5000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:5000/health', timeout=4)"]
# Docker stops a container with SIGTERM, which lets running requests end.
ENTRYPOINT ["vanilla-transformer", "serve", "--model", "/model", "--host", "0.0.0.0", "--port", "5000"]
