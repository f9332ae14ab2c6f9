# Sourced by every RUN step that installs something. Nothing of it stays in the image.
umask 022
export HOME=/tmp LANG=C.UTF-8 VIRTUAL_ENV=@VENV@
export UV_CACHE_DIR=@INSIDE@/cache UV_LINK_MODE=copy UV_COMPILE_BYTECODE=0 UV_NO_PROGRESS=1
export UV_PYTHON_DOWNLOADS=never
# The site's way to the network: proxies, indexes, certificates; and, as "$@", where uv finds torch's build.
. @INSIDE@/network/variables.sh
