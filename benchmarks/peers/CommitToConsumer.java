import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Random;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Sends transactions one after another and measures, in milliseconds, how long a consumer waits for
 * each: from the moment the local transaction says commit. Arguments: name server, bytes, count.
 */
public class CommitToConsumer {
    private static final String TOPIC = "CommitToConsumer";
    private static final int WARMUP = 300;

    private record Arrival(long number, long at) {}

    public static void main(String[] arguments) {
        try {
            measure(arguments);
        } catch (Exception error) {
            error.printStackTrace();
        }
        System.out.flush();
        Runtime.getRuntime().halt(0); // the clients' threads would go on
    }

    private static void measure(String[] arguments) throws Exception {
        int size = Integer.parseInt(arguments[1]);
        int count = Integer.parseInt(arguments[2]) + WARMUP;
        var arrivals = new LinkedBlockingQueue<Arrival>();
        var committer = new Committer();
        var producer = new TransactionMQProducer("commit-to-consumer");
        producer.setNamesrvAddr(arguments[0]);
        producer.setTransactionListener(committer);
        producer.start();
        // The topic comes into being with the first message, which nobody measures.
        producer.sendMessageInTransaction(new Message(TOPIC, body(new Random(1), size, -1)), null);
        DefaultMQPushConsumer consumer = consumer(arguments[0], arrivals);
        if (arrivals.poll(60, TimeUnit.SECONDS) == null) {
            throw new IllegalStateException("the consumer got nothing");
        }
        double[] visible = new double[count - WARMUP];
        double[] sent = new double[count - WARMUP];
        var random = new Random(2);
        for (int number = 0; number < count; number++) {
            long began = System.nanoTime();
            producer.sendMessageInTransaction(new Message(TOPIC, body(random, size, number)), null);
            long acknowledged = System.nanoTime();
            Arrival arrival = arrivals.poll(30, TimeUnit.SECONDS);
            while (arrival != null && arrival.number() < number) {
                arrival = arrivals.poll(30, TimeUnit.SECONDS); // that one came again
            }
            if (arrival == null) {
                throw new IllegalStateException("message " + number + " did not come");
            }
            if (number >= WARMUP) {
                visible[number - WARMUP] = (arrival.at() - committer.at) / 1e6;
                sent[number - WARMUP] = (acknowledged - began) / 1e6;
            }
        }
        tell("visible", visible);
        tell("sent", sent);
    }

    private static DefaultMQPushConsumer consumer(
            String names, BlockingQueue<Arrival> arrivals) throws Exception {
        var consumer = new DefaultMQPushConsumer("commit-to-consumer-reader");
        consumer.setNamesrvAddr(names);
        consumer.setConsumeFromWhere(
                org.apache.rocketmq.common.consumer.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(TOPIC, "*");
        consumer.registerMessageListener(
                (MessageListenerConcurrently) (messages, context) -> {
                    long now = System.nanoTime();
                    for (MessageExt one : messages) {
                        arrivals.add(new Arrival(ByteBuffer.wrap(one.getBody()).getLong(), now));
                    }
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                });
        consumer.start();
        return consumer;
    }

    private static byte[] body(Random random, int size, long number) {
        byte[] bytes = new byte[Math.max(size, Long.BYTES)];
        random.nextBytes(bytes);
        ByteBuffer.wrap(bytes).putLong(number);
        return bytes;
    }

    private static void tell(String what, double[] times) {
        Arrays.sort(times);
        System.out.printf(
                java.util.Locale.ROOT,
                "%s_p50 %.3f%n%s_p99 %.3f%n",
                what,
                times[(int) Math.round((times.length - 1) * 0.5)],
                what,
                times[(int) Math.round((times.length - 1) * 0.99)]);
    }

    /** Says commit, and notes when. */
    private static final class Committer implements TransactionListener {
        volatile long at;

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            at = System.nanoTime();
            return LocalTransactionState.COMMIT_MESSAGE;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }
    }
}
