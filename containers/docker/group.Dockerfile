
# @GROUP@: @COUNT@
RUN @MOUNTS@ \
    . @TOOLS@/steps.sh && \
    @COMMANDS@ && \
    @SETTLE@
