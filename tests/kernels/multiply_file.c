/* multiply_file IN OUT: the products of a file, for a CPU that only an emulator here has.
 *
 * IN: for each product the Matrix without its addresses, the type and the number of the rows, the
 * sizes of what follows, and weight, scales, zeros, order, bias, levels and rows (see test_widths.py).
 * OUT: what they give. Exit code 1 where fewer rows give other bits, 2 where IN is no such file.
 */
#include "products.c"

#include <stdio.h>

typedef struct {
    int64_t out, columns, group, kind, scale_kind, middle, row_kind, rows, sizes[7];
} Head;

int main(int count, char **names)
{
    FILE *in = count == 3 ? fopen(names[1], "rb") : NULL;
    FILE *out = in ? fopen(names[2], "wb") : NULL;
    Head head;
    if (!out)
        return 2;
    while (fread(&head, sizeof head, 1, in) == 1) {
        void *part[7];
        for (int i = 0; i < 7; i++) {
            part[i] = head.sizes[i] ? room(head.sizes[i]) : NULL;
            if (head.sizes[i] && fread(part[i], head.sizes[i], 1, in) != 1)
                return 2;
        }
        Matrix matrix = {part[0], part[1], part[2], part[3], part[4], part[5], head.out,
                         head.columns, head.group, head.kind, head.scale_kind, head.middle};
        int64_t row = head.sizes[6] / head.rows / head.columns * head.out;
        char *whole = room(row * head.rows), *fewer = room(row * head.rows);
        if (multiply(&matrix, part[6], whole, head.rows, head.row_kind, 1))
            return 2;
        for (int64_t rows = 1; rows < head.rows; rows++)
            if (multiply(&matrix, part[6], fewer, rows, head.row_kind, 1)
                || memcmp(fewer, whole, row * rows))
                return 1;
        fwrite(whole, row, head.rows, out);
    }
    return fclose(out) != 0;
}
