/* The product of a block of rows with packed weights: the core of convolutions and matrix products.
 *
 * A row of the left operand is a list of `chunks` pieces of `length` contiguous floats, given by a table of pointers, so
 * a convolution multiplies its input where it lies. The right operand is cut into panels of 24, 16 or 8 columns; in a
 * packed panel the columns of one k lie together and k follows k (k runs through the chunks in order).
 */
#ifndef OUTRIDER_TILES_H
#define OUTRIDER_TILES_H

#include "epilogue.h"

#define MOST_ROWS 8 /* of a tile; tables have readable entries for as many rows behind the last */

struct block {
    const float *const *table; /* [chunks][pitch] */
    int64_t pitch, chunks, length;
    int64_t offset; /* floats to add to every pointer of the table: where the channels of a group begin */
    int64_t rows;
    const struct epilogue *e;
    int64_t row;     /* position of the first row in y, for the residual */
    struct place to; /* where the first row begins in y */
};

/* The widest panel for the next columns when `left` are left: 24, 16 or 8. Panels of 8 are only made for up to 8. */
INLINE int64_t panel_width(int64_t left)
{
    int64_t vectors = (left + 7) / 8;
    return vectors == 1 ? 8 : vectors == 2 || vectors == 4 ? 16 : 24;
}

/* Where panel `number` of n columns begins; n behind the last. */
INLINE int64_t panel_start(int64_t n, int64_t number)
{
    int64_t column = 0;
    while (number-- > 0 && column < n)
        column += panel_width(n - column);
    return column < n ? column : n;
}

INLINE int64_t panel_count(int64_t n)
{
    int64_t count = 0;
    for (int64_t column = 0; column < n; column += panel_width(n - column))
        count++;
    return count;
}

/* All rows of the block times one panel, `width` columns wide, of which the first `columns` exist; k-rows of the panel
 * lie `step` floats apart (`width` when packed). `column`: of its first column in y. */
void multiply_panel(const struct block *b, const float *panel, int64_t step, int64_t width, int64_t columns,
                    int64_t column);

/* All rows of the block times one column; weights [chunks][length rounded up to 8], zeros behind each chunk. `sums` has
 * room for the rows, rounded up to 8. bias, scale and shift of the epilogue hold the one number eight times. */
void multiply_column(const struct block *b, const float *weights, float *sums);

#endif
