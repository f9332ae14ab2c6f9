# Lays out the CUDA packages of the index below $1 as a CUDA_HOME: what linkers, CMake and torch expect.
for program in "$1"/bin/* "$1"/nvvm/bin/*; do
    [ ! -f "$program" ] || chmod a+x "$program"
done
[ -e "$1/lib64" ] || ln -s lib "$1/lib64"
for library in "$1"/lib/lib*.so.*; do
    plain=${library%%.so.*}.so
    [ -e "$plain" ] || ln -s "${library##*/}" "$plain"
done
"$1/bin/nvcc" --version
