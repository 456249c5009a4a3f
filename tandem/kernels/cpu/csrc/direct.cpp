// The list of the functions that Python may call directly.
#include "direct.h"

#include <cstring>

namespace direct {

constexpr int METH_FASTCALL = 0x0080;
static Entry* first = nullptr;
PyObject* error_type = nullptr;
const char* error_text = "";

Entry::Entry(const char* name, PyFastFunction function) : definition{name, function, METH_FASTCALL, nullptr}, next(first) { first = this; }

}  // namespace direct

// What to raise where memory runs out. Both live as long as the library.
extern "C" void tandem_raise_as(PyObject* type, const char* text) {
  direct::error_type = type;
  direct::error_text = text;
}

// The builtin of that name, or the integer 0 where there is none. To be called with the interpreter's lock held.
extern "C" PyObject* tandem_direct(const char* name) {
  for (direct::Entry* entry = direct::first; entry != nullptr; entry = entry->next)
    if (std::strcmp(entry->definition.name, name) == 0) return PyCFunction_NewEx(&entry->definition, nullptr, nullptr);
  return PyLong_FromLong(0);
}
