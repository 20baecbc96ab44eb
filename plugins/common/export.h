#pragma once

// Launchers are the only symbols the kernel library shows.
#define REDKNOT_API __attribute__((visibility("default")))
