/* libcuda.so.1 of a machine without a driver: libraries that are linked to it load, and find no GPU.

   For imports alone: Transformer Engine's core is linked to it, and asks it nothing when it is loaded. */

#include <sys/types.h>
#include <unistd.h>

#define CUDA_ERROR_NOT_INITIALIZED 3
#define CUDA_ERROR_NO_DEVICE 100

/* A fork of a process that called it is refused, as the driver refuses it. */
int cuInit(unsigned flags) {
  static pid_t caller;
  (void)flags;
  if (caller && caller != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  caller = getpid();
  return CUDA_ERROR_NO_DEVICE;
}

int cuDeviceGetCount(int *count) { *count = 0; return CUDA_ERROR_NO_DEVICE; }

int cuDriverGetVersion(int *version) { *version = 0; return 0; }
