// Numbers of the contract programs: the same in every run.
#pragma once

#include <cstdint>

inline uint32_t random_state = 12345;
inline uint32_t next_random() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}
inline float next_float() { return static_cast<float>(next_random() % 2001) / 1000.0f - 1.0f; }
