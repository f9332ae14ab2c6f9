#!/bin/sh
# pyxis' importer (plugstack.conf: importer=/usr/local/libexec/envbuild-importer): certified images, from envbuild's store.
# It runs as the job's user, with the job's environment: what the site decides is set here, over what the job has.
set -eu
site=/etc/envbuild
export ENVBUILD_CONFIG="$site/config.toml" ENVBUILD_TRUST="$site/trust.toml"
unset ENVBUILD_PULL_POLICY PYTHONPATH PYTHONHOME
[ ! -e "$site/policy.toml" ] || export ENVBUILD_PULL_POLICY="$site/policy.toml"
# Where the hook looks for what was verified: TMPDIR may be none on this node.
[ -w "${TMPDIR:-}" ] || TMPDIR=/tmp
export TMPDIR
exec envbuild importer "$@"
