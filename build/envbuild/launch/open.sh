#!/bin/sh
# Mounts a .sqsh and becomes a command. Run in a mount namespace of its own, with which the mount goes away.
# usage: open.sh PROGRAM SQSH MOUNTPOINT COMMAND...     (PROGRAM: mount or squashfuse)
set -eu
program=$1 sqsh=$2 mountpoint=$3
shift 3
case ${program##*/} in
    mount) "$program" -t squashfs -o loop,ro,nosuid,nodev "$sqsh" "$mountpoint" ;;
    *) "$program" -o ro,nosuid,nodev "$sqsh" "$mountpoint" ;;
esac
exec "$@"
