// The first ids of a row by (value descending, id ascending), without sorting the row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace foreword {

struct Entry {
    float value;
    int32_t id;
};

inline bool ranks_before(const Entry& a, const Entry& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// Move the shortest prefix of the ranking whose weights reach `need` to the front, and return its length.
// Weights are integers, so their order of summation is free. All of them together reach `need`.
template <class Weight>
size_t partition_prefix(std::vector<Entry>& entries, int64_t need, Weight weight) {
    auto begin = entries.begin(), end = entries.end();
    while (end - begin > 32) {
        const auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, ranks_before);
        int64_t reached = 0;
        for (auto entry = begin; entry != middle; ++entry) reached += weight(*entry);
        if (reached >= need) {
            end = middle;
        } else {
            need -= reached;
            begin = middle;
        }
    }
    std::sort(begin, end, ranks_before);
    while (need > 0 && begin != end) need -= weight(*begin++);
    return static_cast<size_t>(begin - entries.begin());
}

}  // namespace foreword
