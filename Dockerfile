# Two images:
#   docker build --target proxy -t txbroker .         the command, for proxies and topics
#   docker build --target audit -t txbroker-audit .   the same with Java and Spark, for audits
# Python and Debian are those that the tests run with; constraints.txt holds every other version.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt setup.cfg pyproject.toml README.md LICENSE ./
COPY txbroker txbroker
COPY checkers checkers
COPY cli cli
COPY spark spark
RUN python3 -m venv /opt/txbroker
RUN /opt/txbroker/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[cli,proxy,fast]'

FROM build AS build-audit
RUN /opt/txbroker/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[cli,proxy,fast,spark]'

FROM python:3.11-slim-bookworm AS base
RUN groupadd --gid 10001 txbroker && useradd --uid 10001 --gid 10001 --create-home txbroker
ENV PATH=/opt/txbroker/bin:$PATH PYTHONUNBUFFERED=1
# The only folder that is written where the rest is read-only. Spark writes to where it is called.
WORKDIR /tmp

FROM base AS audit
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-audit /opt/txbroker /opt/txbroker
# The connector is part of the image, so that no audit needs a network for it.
ARG TXBROKER_MAVEN_REPOSITORY
RUN XDG_CACHE_HOME=/tmp/cache python3 -m txbroker.cli.connector && rm -rf /tmp/cache
USER 10001:10001
ENTRYPOINT ["txbroker"]
CMD ["--help"]

# The last one is built where no target is named.
FROM base AS proxy
COPY --from=build /opt/txbroker /opt/txbroker
USER 10001:10001
EXPOSE 8470
ENTRYPOINT ["txbroker"]
CMD ["proxy"]
