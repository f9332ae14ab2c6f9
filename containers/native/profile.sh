# A login shell's /etc/profile sets PATH anew, and enroot starts login shells: put the environment first again.
case ":${PATH}:" in
    *":@VENV@/bin:"*) ;;
    *) PATH=@FRONT@:"${PATH}" ;;
esac
export PATH
export VIRTUAL_ENV="@VENV@"
