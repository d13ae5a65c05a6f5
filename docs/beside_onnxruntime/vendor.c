/* A vendor's library with a fault in it, as ONNX Runtime loads it.

   cc -shared -fPIC -O1 -DFAULT=SEGFAULT -o vendor.so vendor.c -lm

   SEGFAULT  an execution provider plugin that reads through a null pointer when it is registered
   HANG      one that waits for ever there, as for a device that does not answer
   KERNEL    a custom operator, vendor::Sqrt, whose iteration never converges for NaN

   onnxruntime's packages bring no headers, so the little that is used of its C interface is declared here: tables of
   functions that only ever grow at their end. Positions are those of version 1 of OrtApi, OrtCustomOp is of version 8.
*/

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#define SEGFAULT 1
#define HANG 2
#define KERNEL 3

typedef struct {
    const void **(*GetApi)(uint32_t version);
    const char *(*GetVersionString)(void);
} OrtApiBase;

#if FAULT == SEGFAULT || FAULT == HANG

void *CreateEpFactories(const char *name, const OrtApiBase *base, const void *logger, void **factories, size_t room,
                        size_t *count)
{
    (void)name, (void)base, (void)logger, (void)factories, (void)room;
    if (FAULT == SEGFAULT) {
        volatile int *device = NULL;
        *count = (size_t)*device;
    }
    for (;;)
        pause();
}

void *ReleaseEpFactory(void *factory)
{
    (void)factory;
    return NULL;
}

#else

enum {
    CREATE_CUSTOM_OP_DOMAIN = 26,
    CUSTOM_OP_DOMAIN_ADD = 27,
    ADD_CUSTOM_OP_DOMAIN = 28,
    GET_TENSOR_MUTABLE_DATA = 51,
    KERNEL_CONTEXT_GET_INPUT = 90,
    KERNEL_CONTEXT_GET_OUTPUT = 91,
};
enum { API_VERSION = 8, FLOAT = 1, LENGTH = 4 };

static const void **api;

/* All return NULL, or a status object that says what went wrong. */
#define CALL(position, type) ((type)(uintptr_t)api[position])
typedef void *(*CreateDomain)(const char *name, void **domain);
typedef void *(*AddTo)(void *to, const void *what);
typedef void *(*GetData)(void *value, void **data);
typedef void *(*GetInput)(const void *context, size_t index, const void **value);
typedef void *(*GetOutput)(void *context, size_t index, const int64_t *dims, size_t rank, void **value);

/* Newton's iteration for the square root. A comparison with NaN is false: then it never ends. */
static float root(float x)
{
    volatile float guess = x > 1 ? x : 1, before;
    do {
        before = guess;
        guess = (guess + x / guess) / 2;
    } while (!(fabsf(guess - before) <= 1e-6f * guess));
    return guess;
}

static void compute(void *kernel, void *context)
{
    const int64_t dims[] = {LENGTH};
    const void *input;
    void *output, *from, *to;
    (void)kernel;
    if (CALL(KERNEL_CONTEXT_GET_INPUT, GetInput)(context, 0, &input) ||
        CALL(KERNEL_CONTEXT_GET_OUTPUT, GetOutput)(context, 0, dims, 1, &output) ||
        CALL(GET_TENSOR_MUTABLE_DATA, GetData)((void *)input, &from) ||
        CALL(GET_TENSOR_MUTABLE_DATA, GetData)(output, &to))
        return;
    for (int i = 0; i < LENGTH; i++)
        ((float *)to)[i] = root(((const float *)from)[i]);
}

static void *create(const void *op, const void *given, const void *info)
{
    (void)given, (void)info;
    return (void *)op;
}

static const char *name(const void *op) { return (void)op, "Sqrt"; }
static const char *provider(const void *op) { return (void)op, NULL; } /* ONNX Runtime's CPU provider */
static int type(const void *op, size_t index) { return (void)op, (void)index, FLOAT; }
static size_t one(const void *op) { return (void)op, 1; }
static void destroy(void *kernel) { (void)kernel; }
static int required(const void *op, size_t index) { return (void)op, (void)index, 0; }

static const struct {
    uint32_t version;
    void *(*CreateKernel)(const void *op, const void *api, const void *info);
    const char *(*GetName)(const void *op);
    const char *(*GetExecutionProviderType)(const void *op);
    int (*GetInputType)(const void *op, size_t index);
    size_t (*GetInputTypeCount)(const void *op);
    int (*GetOutputType)(const void *op, size_t index);
    size_t (*GetOutputTypeCount)(const void *op);
    void (*KernelCompute)(void *kernel, void *context);
    void (*KernelDestroy)(void *kernel);
    int (*GetInputCharacteristic)(const void *op, size_t index);
    int (*GetOutputCharacteristic)(const void *op, size_t index);
} custom_op = {API_VERSION, create, name, provider, type, one, type, one, compute, destroy, required, required};

void *RegisterCustomOps(void *session_options, const OrtApiBase *base)
{
    void *domain, *status;
    api = base->GetApi(API_VERSION);
    status = CALL(CREATE_CUSTOM_OP_DOMAIN, CreateDomain)("vendor", &domain);
    if (!status)
        status = CALL(CUSTOM_OP_DOMAIN_ADD, AddTo)(domain, &custom_op);
    if (!status)
        status = CALL(ADD_CUSTOM_OP_DOMAIN, AddTo)(session_options, domain);
    return status;
}

#endif
