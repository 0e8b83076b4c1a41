/* A CUDA runtime without a GPU: streams are not asynchronous, and every call can be made to fail once. PREFIX is cuda or hip. */
#include <stddef.h>
#include <string.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(call) JOIN(PREFIX, call)

static int last_error = 0;
static int failure = 0;      /* of the next call */
static void* registered[64];
static unsigned flags_seen = 0;

static int done(int code) {
  int result = failure != 0 ? failure : code;
  failure = 0;
  if (result != 0) last_error = result;
  return result;
}

void fake_fail(int code) { failure = code; }
unsigned fake_flags(void) { return flags_seen; }
int fake_last_error(void) { return last_error; }

int NAME(MemcpyAsync)(void* target, const void* source, size_t bytes, int kind, void* stream) {
  (void)stream;
  if (failure == 0 && kind == 1) memcpy(target, source, bytes);
  return done(kind == 1 ? 0 : 21);
}

int NAME(LaunchHostFunc)(void* stream, void (*function)(void*), void* data) {
  (void)stream;
  if (failure == 0) function(data);
  return done(0);
}

static void** find(void* address) {
  for (int index = 0; index < 64; ++index)
    if (registered[index] == address) return &registered[index];
  return 0;
}

int NAME(HostRegister)(void* address, size_t bytes, unsigned flags) {
  if (failure != 0 || bytes == 0) return done(1);
  if (find(address) != 0) return done(712);
  *find(0) = address;
  flags_seen = flags;
  return done(0);
}

int NAME(HostUnregister)(void* address) {
  if (failure != 0 || find(address) == 0) return done(713);
  *find(address) = 0;
  return done(0);
}

int NAME(StreamCreateWithFlags)(void** stream, unsigned flags) {
  static size_t created = 0;
  *stream = (void*)(0x1000 + 16 * ++created);
  return done(flags == 1 ? 0 : 1);
}

int NAME(GetLastError)(void) {
  int code = last_error;
  last_error = 0;
  return code;
}

const char* NAME(GetErrorString)(int code) { return code == 2 ? "out of memory" : code == 712 ? "already registered" : "unknown error"; }
