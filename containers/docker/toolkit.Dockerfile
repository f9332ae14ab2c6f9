# The CUDA toolkit, of the package index's packages.
RUN @MOUNTS@ \
    . @TOOLS@/steps.sh && \
    @INSTALL@ && \
    . @TOOLS@/toolkit.sh @HOME@
