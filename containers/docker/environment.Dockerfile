
# The image: a step for each group of packages, those that seldom change first.
FROM base AS image
RUN @MOUNTS@ \
    . @TOOLS@/steps.sh && \
    @VENV_COMMAND@ && \
    @SETTLE@
