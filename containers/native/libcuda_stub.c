/* libcuda.so.1 of a machine without a driver: libraries that are linked to it load, and find no GPU.

   For imports alone: Transformer Engine's core is linked to it, and asks it nothing when it is loaded. */

#define CUDA_ERROR_NO_DEVICE 100

int cuInit(unsigned flags) { (void)flags; return CUDA_ERROR_NO_DEVICE; }

int cuDeviceGetCount(int *count) { *count = 0; return CUDA_ERROR_NO_DEVICE; }

int cuDriverGetVersion(int *version) { *version = 0; return 0; }
