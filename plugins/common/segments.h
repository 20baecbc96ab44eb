#pragma once

namespace redknot::segment {

// Columns of a segment table, int64 [segments, kColumnCount]; their meaning: trt_redknot/ops/tables.py.
enum Column : int { kStart, kStop, kLatent, kEntry, kEntries, kColumnCount };

}  // namespace redknot::segment
