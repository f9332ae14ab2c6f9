# @TITLE@. Rendered by envbuild from containers/docker/; needs BuildKit, and no frontend image.
# The build context, made by envbuild:
#   base/      @BASE_TEXT@
#   tools/     uv @UV@, and the scripts of containers/docker/ and containers/native/ that steps run
#   lock/      for each step the part of the lock that it installs, pinned and hashed
#   places/    for each step the files that it needs from folders of the building machine (find-links, file:// indexes)
#   built/     for each step the compiled wheels of the wheelhouse that it installs
#   sources/   sources of the wheels that the stage `wheels` builds, and the variables of each build
#   network/   proxies, certificates, names of indexes, credentials: seen by steps, in no layer and in no history
#   configuration.tar.gz   files of the image beside base and environment
