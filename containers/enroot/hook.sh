#!/bin/sh
# enroot's hook (/etc/enroot/hooks.d/05-envbuild.sh): a step of a Slurm job starts only what the importer has verified for
# it, and containers that were started so before. It stops mistakes, such as --container-image=/home/me/old.sqsh. It does
# not stop a user who wants to: enroot runs with the user's rights and configuration.
set -eu
[ -n "${SLURM_JOB_ID:-}" ] || exit 0
job="${TMPDIR:-/tmp}/envbuild-${SLURM_JOB_UID:-$(id -u)}/jobs/$SLURM_JOB_ID"
root="${ENROOT_ROOTFS##*/}"
if [ -s "$job/${SLURM_STEP_ID:-}" ]; then
    # A named container (--container-name) keeps its root file system for later steps of the job.
    case "$root" in
    overlay | pyxis_"$SLURM_JOB_ID".*) ;;
    *) mkdir -p "$job/containers" && : > "$job/containers/$root" ;;
    esac
    exit 0
fi
[ ! -e "$job/containers/$root" ] || exit 0
cat >&2 << EOF
error: this container is not started
cause: its image did not come through envbuild's importer, which verifies certificates.
help: name a published image: srun --container-image='REGISTRY#REPO:TAG' (envbuild status lists them).
EOF
exit 1
