#!/bin/sh
# Slurm's Prolog (slurm.conf: Prolog=/etc/slurm/envbuild-prolog.sh): cancels a job whose .sqsh was not verified on this
# node. A .sqsh is verified by the certificate next to it (envbuild pull --output writes both) and the site's trusted keys.
# An image of a registry is the importer's. A Prolog that fails drains the node: the job is cancelled instead, and only
# where that fails the node is drained.
# pyxis' option as Slurm hands it to a Prolog; sbatch's own option is seen, one of a later srun is the enroot hook's.
set -eu
image="${SPANK__SLURM_SPANK_OPTION_pyxis_container_image:-}"
trust="${ENVBUILD_TRUST:-/etc/envbuild/trust.toml}" # slurmd starts a Prolog with its own environment, not the job's
case "$image" in
'' | *://* | *'#'*) exit 0 ;;
./* | ../*) image="${SLURM_JOB_WORK_DIR:-/}/$image" ;;
/*) ;;
*) exit 0 ;; # a name, such as ubuntu:24.04: the importer verifies it
esac
if why=$(envbuild certificate verify "$image.intoto.jsonl" --image "$image" --trust "$trust" 2>&1); then
    exit 0
fi
cat >&2 << EOF
error: job ${SLURM_JOB_ID:?} is cancelled
cause: $image has no certificate that counts here. $why
help: pull it again: envbuild pull REGISTRY/REPO:TAG --output $image
EOF
scancel "$SLURM_JOB_ID"
