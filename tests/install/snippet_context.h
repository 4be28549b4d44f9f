/* Names that the C code in the documentation uses. */
#include <crossdock/crossdock.h>

extern const int32_t* ids;   /* [T, K] */
extern const float* weights; /* [T, K] */
extern const float* x;       /* [T, D] */
extern int64_t T;
extern crossdock_tensor y; /* [R, D] */
