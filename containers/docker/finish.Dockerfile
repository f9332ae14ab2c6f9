
# Configuration; then what is installed is compared with the lock, and folders of the base get the base's times again.
ADD configuration.tar.gz /
RUN @MOUNTS@ \
    @PYTHON@ -S -s @TOOLS@/settle.py check @SITE_PACKAGES@ @INSIDE@/lock/packages.json && \
    @PYTHON@ -S -s @TOOLS@/settle.py restore @INSIDE@/base
@ENV@
@LABELS@
@START@
