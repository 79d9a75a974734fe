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

inline bool before(const Entry& a, const Entry& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// Moves the shortest run of first entries whose weights reach `need` to the front and returns its length.
// Weights are whole numbers, so the order in which they are added is free. All of them together reach `need`.
template <class Weight>
size_t partition_run(std::vector<Entry>& entries, int64_t need, Weight weight) {
    auto begin = entries.begin(), end = entries.end();
    while (end - begin > 32) {
        const auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, before);
        int64_t reached = 0;
        for (auto entry = begin; entry != middle; ++entry) reached += weight(*entry);
        if (reached >= need) {
            end = middle;
        } else {
            need -= reached;
            begin = middle;
        }
    }
    std::sort(begin, end, before);
    while (need > 0 && begin != end) need -= weight(*begin++);
    return static_cast<size_t>(begin - entries.begin());
}

}  // namespace foreword
