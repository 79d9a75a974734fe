// What a function refuses, before it writes anything. Ids, sizes and offsets come from files, requests and peers.
#pragma once

#include <cstdint>

namespace foreword {

// kernels/cpu/library.py has the messages.
enum class InputError : int32_t { NONE, TOKEN_ID, POSITION, SLOT, BLOCK, ROW, ROW_STARTS, ADAPTER_SLOT, DRAFT_JOB, COUNT, ID_STARTS, FORMAT, TEXT, STATE };

}  // namespace foreword
