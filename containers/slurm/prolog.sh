#!/bin/sh
# Slurm's Prolog and Epilog (slurm.conf: Prolog= and Epilog=/etc/slurm/envbuild-prolog.sh): cancels a job whose .sqsh was
# not verified on this node, and leaves a note for enroot's hook about one that was. A .sqsh is verified by the
# certificate next to it (envbuild pull --output writes both) and the site's trusted keys. An image of a registry is the
# importer's. A Prolog that fails drains the node: the job is cancelled instead, and only where that fails the node is
# drained.
# A Prolog sees pyxis' option of sbatch, salloc, or an srun that makes the job; an option of a later srun, and
# PYXIS_CONTAINER_IMAGE, are the hook's.
set -eu
umask 022
export LC_ALL=C
site=/etc/envbuild
notes=/run/envbuild/jobs # only root writes there

# slurmd starts a Prolog without PATH, and with neither its own environment nor the job's: what the site wants is in this
# file (PATH, ENVBUILD_TRUST, ENVBUILD_IMAGE_FOLDER).
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENVBUILD_TRUST=$site/trust.toml
ENVBUILD_IMAGE_FOLDER=
# shellcheck disable=SC1091
[ ! -f "$site/prolog.env" ] || . "$site/prolog.env"

# In one line, without what a terminal acts on: control characters, those of UTF-8 too (U+0080 to U+009F).
printable() { printf '%s' "$1" | tr '[:cntrl:]' ' ' | sed 's/\xc2[\x80-\x9f]/ /g'; }

# A word as a shell takes it, whatever is in it: the printf of sh has no %q.
quoted() { printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")"; }

# cancel CAUSE HELP: an srun or salloc that waits shows both; `scontrol show job` and sacct have them as AdminComment.
cancel() {
    cause=$(printable "$1" | cut -c -800) help=$(printable "$2")
    # One task of an array is ARRAY_TASK: scancel does nothing for its own number and ends with 0, or ends all tasks.
    job=$(squeue --noheader --array --jobs="$SLURM_JOB_ID" --format='%A %i' | sed -n "s/^$SLURM_JOB_ID //p")
    job=${job:-$SLURM_JOB_ID}
    printf 'error: job %s is cancelled\ncause: %s\nhelp: %s\n' "$SLURM_JOB_ID" "$cause" "$help" >&2
    scontrol update "JobId=$job" "AdminComment=envbuild: cancelled. Cause: $cause Help: $help" >&2 || true
    scontrol notify "$SLURM_JOB_ID" "envbuild cancels this job. Cause: $cause Help: $help" >&2 || true
    scancel "$job"
    exit 0
}

# As the job's user, who may read less than root: a relative path is another one where the user cannot enter the folder.
readable() {
    if [ "$(id -u)" = 0 ]; then
        setpriv --reuid "$SLURM_JOB_UID" --regid "$SLURM_JOB_GID" --init-groups test -r "$1"
    else
        test -r "$1"
    fi
}

# The file that a path leads to from a folder, and a dot, which keeps line ends.
resolved() { cd "$1" && readlink -nf -- "$path" && echo .; }

# Whether only root can change what the path names: no link is in it, and root owns each folder on the way and the file.
only_roots() {
    [ "$file" = "$path." ] || return 1
    place=$path
    while [ -n "$place" ]; do
        mode=$(stat -c %a -- "$place") # of a folder with the sticky bit, such as /tmp, nobody takes root's files away
        [ "$(stat -c %u -- "$place")" = 0 ] && { [ $((0$mode & 022)) = 0 ] || [ $((0$mode & 01000)) != 0 ]; } || return 1
        place=${place%/*}
    done
}

# The steps of a heterogeneous job have its first component's number.
note=$notes/${SLURM_HET_JOB_ID:-$SLURM_JOB_ID}
rm -f "$note"
case "${SLURM_SCRIPT_CONTEXT:-}" in epilog*) exit 0 ;; esac

# What begins with . or / is a path for pyxis, whatever else is in it; all else goes to the importer.
image="${SPANK__SLURM_SPANK_OPTION_pyxis_container_image:-}"
case "$image" in
/*) path=$image ;;
.*) path=${SLURM_JOB_WORK_DIR:-}/$image ;;
*) exit 0 ;;
esac
[ "$path" = "$(printable "$path")" ] ||
    cancel "The path of the image has a control character." "Rename the file or its folder."
pull="Pull it again: envbuild pull REGISTRY/REPO:TAG --output $(quoted "$path")"
{ readable "$path" && readable "$path.intoto.jsonl"; } ||
    cancel "$path or its certificate next to it, $path.intoto.jsonl, is missing or closed to the job's user." "$pull"
file=$(resolved /) || cancel "Root, who verifies $path, cannot enter its folder." "Put both files where root may read them."
# A link may lead to /proc/self/cwd, which is another folder in the step.
[ "$file" = "$(resolved /proc)" ] || cancel "$image is another file for each process." "Name the file without /proc/self."
# enroot drops line ends at the end of a name, and would open another file.
case "$image$file" in *[[:cntrl:]]*) cancel "The path of the image has a control character." "Rename the file." ;; esac
if [ -n "$ENVBUILD_IMAGE_FOLDER" ]; then
    case "$path" in "${ENVBUILD_IMAGE_FOLDER%/}"/*) only_roots ;; *) false ;; esac ||
        cancel "Images start only from $ENVBUILD_IMAGE_FOLDER, where root alone can change them; $image is not such a file." \
            "Name one of these by its whole path, or a published image: --container-image='REGISTRY#REPO:TAG'"
fi
# An end, since scancel ends no Prolog: a file with holes may say that it has 16 TB.
verified=$(timeout 20m envbuild certificate verify "$path.intoto.jsonl" --image "$path" --trust "$ENVBUILD_TRUST" 2>&1) ||
    cancel "$image has no certificate that counts here. ${verified:-It could not be read in 20 minutes.}" "$pull"
mkdir -p "$notes"
# The digest by which /etc/rc of the image names it.
printf '%s\n' "$verified" | sed -n 's/^about: .*\.oci \(sha256:[0-9a-f]*\)$/\1/p' >"$note"
