// A separate header, so that a test can change it and see the kernel compiled again.
#pragma once

constexpr float kFactor = 1.0f;
