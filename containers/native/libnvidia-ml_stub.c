/* libnvidia-ml.so.1 (NVML) of a machine with one GPU, for the check whether imports start CUDA.

   torch asks NVML whether there is a GPU where it may not start CUDA for that. The answer has to be yes, as on a node:
   most of what starts CUDA does so only where there is a GPU. */

int nvmlInit(void) { return 0; }

int nvmlInit_v2(void) { return 0; }

int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
