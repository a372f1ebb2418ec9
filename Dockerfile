# volley's server from its own wheel. Models, the drafter, the reservoir and the certificate lie in the volume /data.
#   docker build -t volley .        --build-arg TORCH="torch==2.13.0 --index-url INDEX" takes PyTorch from an index of CPU builds
#   docker compose up
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG TORCH=torch
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir ${TORCH} && pip install --no-cache-dir "$(echo /wheels/*.whl)[grammar]" && rm -r /wheels
RUN useradd --create-home volley && mkdir /data && chown volley /data
USER volley
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["volley"]
CMD ["serve", "--host", "0.0.0.0"]
