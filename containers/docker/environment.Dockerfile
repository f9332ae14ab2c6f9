
# The image: a step for each group of packages, those that seldom change first.
FROM base AS image
RUN @MOUNTS@ \
    . @TOOLS@/steps.sh && \
    @TOOLS@/uv venv --python @PYTHON@ --no-project @VENV@ && \
    @SETTLE@
