#include "machines.h"
SUITE(model_suite) {
}
