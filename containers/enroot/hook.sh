#!/bin/sh
# enroot's hook (/etc/enroot/hooks.d/05-envbuild.sh): a step of a Slurm job starts only what the importer has verified for
# it, what Slurm's prolog has verified for the job, and containers that were started so before. It stops mistakes, such as
# --container-image=/home/me/old.sqsh. It does not stop a user who wants to: enroot runs with the user's rights and
# configuration.
set -eu
[ -n "${SLURM_JOB_ID:-}" ] || exit 0
notes=/run/envbuild/jobs # containers/slurm/prolog.sh writes them
[ -w "${TMPDIR:-}" ] || TMPDIR=/tmp # as the importer
own="$TMPDIR/envbuild-${SLURM_JOB_UID:-$(id -u)}"
job="$own/jobs/$SLURM_JOB_ID"
# A job that is requeued keeps its number, and its steps begin with 0 again.
step="${SLURM_STEP_ID:-batch}${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}"
root="${ENROOT_ROOTFS##*/}"
# A named container (--container-name) keeps its root file system for later steps of the job.
remember() {
    case "$root" in
    overlay | pyxis_"$SLURM_JOB_ID".*) ;;
    *) mkdir -p "$job/containers" && : > "$job/containers/$root" ;;
    esac
    exit 0
}
# /tmp is open to all: another account may have made this folder first.
if [ -O "$own" ] && [ ! -L "$own" ]; then
    [ ! -s "$job/$step" ] || remember
    [ ! -e "$job/containers/$root" ] || exit 0
fi
# A path can be another one than the job's, and a named container an older one: its first line names the image.
first=
[ ! -f "$ENROOT_ROOTFS/etc/rc" ] || read -r first < "$ENROOT_ROOTFS/etc/rc" || :
case "$SLURM_JOB_ID" in
*[!0-9]*) ;;
*) [ ! -s "$notes/$SLURM_JOB_ID" ] || [ "$first" != "# enroot-provenance: oci:$(cat "$notes/$SLURM_JOB_ID")" ] || remember ;;
esac
cause="neither envbuild's importer nor Slurm's prolog has verified its image for this step."
case "${PYXIS_CONTAINER_IMAGE:-}" in
[./]*) cause="PYXIS_CONTAINER_IMAGE names a path, and Slurm's prolog, which verifies paths, cannot see this variable." ;;
*)
    case "$root" in
    pyxis_[0-9]*) ;;
    pyxis_*) cause="the container ${root#pyxis_} was made before this job (enroot remove removes it), and pyxis starts \
it instead of the image." ;;
    esac
    ;;
esac
cat >&2 << EOF
error: this container is not started
cause: $cause
help: name a published image: srun --container-image='REGISTRY#REPO:TAG' (envbuild status lists them), or give the path of
a pulled .sqsh to the command that makes the job: sbatch, salloc or srun --container-image=PATH
EOF
exit 1
