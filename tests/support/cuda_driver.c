/* A CUDA driver without a GPU: it takes what Triton's launcher asks for, and does nothing. */

#include <stdint.h>
#include <string.h>

static int anything;

#define DOES_NOTHING(name) \
    int name(void) { return 0; }

DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxSetLimit)
DOES_NOTHING(cuDeviceGet)
DOES_NOTHING(cuDevicePrimaryCtxRetain)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuLaunchKernelEx)
DOES_NOTHING(cuOccupancyMaxActiveClusters)
DOES_NOTHING(cuTensorMapEncodeIm2col)
DOES_NOTHING(cuTensorMapEncodeTiled)

int cuCtxGetCurrent(void **context) { return *context = &anything, 0; }
int cuCtxGetLimit(size_t *value, int limit) { return *value = 0, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 1 << 18, 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { return *value = 1024, 0; }
int cuGetErrorString(int error, const char **text) { return *text = "none", 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    return *function = &anything, 0;
}
int cuModuleLoadData(void **module, const void *data) { return *module = &anything, 0; }

int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    memcpy(value, &address, sizeof address);
    return 0;
}
