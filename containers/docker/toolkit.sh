# Makes the packages' folder $1 what linkers, CMake and torch expect of a CUDA_HOME. Sourced by a RUN step.
for program in "$1"/bin/* "$1"/nvvm/bin/*; do
    [ ! -f "$program" ] || chmod a+x "$program"
done
[ -e "$1/lib64" ] || ln -s lib "$1/lib64"
for library in "$1"/lib/lib*.so.*; do
    plain=${library%%.so.*}.so
    [ -e "$plain" ] || ln -s "${library##*/}" "$plain"
done
"$1/bin/nvcc" --version
