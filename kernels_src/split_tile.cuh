// Attention over the keys of a tile in several parts, as `attention_schedule` leaves it for the
// merge.
#pragma once

struct alignas(16) SplitTile {
  int first_row;  // packed, of the whole query: row r is of token r / group
  int num_rows;   // 0: no tile
  int parts;
  int state;  // of part 0
};
