// How many threads this process may use: physical cores, affinity, container quota.
#pragma once

#include <string>

namespace moegraft {

// Cores that the quota text of cgroup v2's cpu.max allows ("max 100000", "150000 100000"); 0: no limit or not understood.
int cores_of_cpu_max(const std::string& text);

// One thread for each physical core in this process's affinity, at most the container's CPU quota, at least 1.
int default_threads();

}  // namespace moegraft
