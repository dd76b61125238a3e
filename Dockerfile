# mmspec serve (docs/deployment.md).
#   docker build -t mmspec .
#   docker build -t mmspec-cuda --build-arg BACKEND= .    # with NVIDIA's libraries
FROM python:3.11-slim

# Compiles the CPU kernels of packed decoders into the wheel, and Triton kernels at their first use.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# A CPU build of torch; an empty BACKEND takes the usual one, with NVIDIA's libraries.
ARG BACKEND=cpu
RUN pip install --no-cache-dir uv && uv pip install --system --no-cache ${BACKEND:+--torch-backend $BACKEND} torch==2.13.0

WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
COPY mmspec mmspec
COPY vision vision
COPY ssm ssm
COPY eval eval
COPY demos demos
RUN pip install --no-cache-dir ".[serve,structured,real]"

# A user by number, as Kubernetes' runAsNonRoot needs. A new volume for the cache belongs to the owner of the folder.
RUN useradd --create-home --uid 10001 mmspec && install --directory --owner 10001 /cache
USER 10001
WORKDIR /home/mmspec
VOLUME /cache

# Fewer of glibc's arenas: a third less memory, as docs/serving.md measures.
ENV MALLOC_ARENA_MAX=2 XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["mmspec", "serve", "--host", "0.0.0.0"]
