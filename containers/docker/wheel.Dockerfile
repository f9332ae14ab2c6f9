RUN @MOUNTS@ \
    . @TOOLS@/steps.sh && . @INSIDE@/sources/variables.sh && \
    mkdir -p /build /wheels && tar -xzf @INSIDE@/sources/source.tar.gz -C /build && \
    @BUILD@ && \
    rm -rf /build
