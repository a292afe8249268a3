// cuDNN's frontend, as this library uses it.
#pragma once

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend.h>

namespace te::cudnn {

namespace fe = ::cudnn_frontend;

}  // namespace te::cudnn
